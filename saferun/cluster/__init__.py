"""Several hosts of one job."""
