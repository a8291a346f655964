"""From what the runs left behind to findings: measured, judged, predicted and put into words."""
