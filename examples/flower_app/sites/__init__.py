"""A Flower app: the same config for the server and for every site."""
