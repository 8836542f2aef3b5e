"""Object stores that speak S3: places in them, and why a place can't be reached."""
