"""From the outcomes of runs to findings: measures, judges, predicts and writes the verdict."""
