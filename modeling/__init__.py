"""The model and its configuration, which are published with the weights; conversion from and to other BERTs."""
