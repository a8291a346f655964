"""Types that every part of Hubring uses: errors, messages, clocks, counters."""
