"""Ways to reach what runs elsewhere: engines so far. No torch here."""
