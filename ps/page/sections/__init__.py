"""What stands under each heading of the page."""
