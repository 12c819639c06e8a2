"""The promises of d2l-bert as tests: they use the command and the public names alone, and compare with something else.

They stay as they are while the code below them changes. BREAKS.md lists errors that were made on purpose, and the
test that caught each.
"""
