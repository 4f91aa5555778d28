"""The router: which executor runs which turn. Pure cores, composed in `router`, and the loop that feeds them."""
