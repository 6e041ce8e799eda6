"""Sessions: one environment each, with a life that has explicit states, a slot, and a lane where its code runs."""
