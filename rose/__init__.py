"""ROSE, as it is installed and imported. In a checkout the packages in this folder are links to those beside it."""
