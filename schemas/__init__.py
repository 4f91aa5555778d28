"""The records that travel on ROSE's topics, and their wire form. The ground floor: imports nothing of ROSE."""
