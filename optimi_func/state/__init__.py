"""An optimizer's `state[p]`: checked, completed, converted, saved and loaded."""
