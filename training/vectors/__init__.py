"""`d2l-bert embed` and `d2l-bert attention`: the vectors of an encoder, and what its heads attend to."""
