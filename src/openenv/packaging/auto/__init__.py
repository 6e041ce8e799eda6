"""Find environments by name, installed or on the Hub: `AutoEnv` makes clients, `AutoAction` finds the models."""
