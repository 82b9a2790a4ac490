"""Features around the classes, which nothing in the package needs: wrappers."""
