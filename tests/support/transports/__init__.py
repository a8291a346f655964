"""What every transport must do, and one within this process."""
