"""The router: assigns turns to executors. Pure cores, composed in `router`, and the loop that feeds them."""
