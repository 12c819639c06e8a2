"""What a benchmark has printed: a line by its start, the numbers in a line."""

import re


def line_with(lines, start):
    return next(line for line in lines if line.strip().startswith(start))


def numbers(line):
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", line)]
