"""What is done inside the image once, when it is built, and what it says of itself."""
