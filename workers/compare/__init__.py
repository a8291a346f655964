"""`ps-compare`: runs one job with several topologies, checks that they agree and compares their speed."""
