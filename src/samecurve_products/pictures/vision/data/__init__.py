"""The images of the vision task: what every source of them gives, and the sources themselves."""
