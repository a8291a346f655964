"""What the live page and the comparison's report are both made with: templates, charts, figures, a style."""
