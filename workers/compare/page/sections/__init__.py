"""The page's sections, one a file, each made of the same material; None where there is nothing to tell."""
