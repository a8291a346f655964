"""What every part of Hubring uses: errors, messages, types, time, counters."""
