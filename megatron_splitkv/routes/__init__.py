"""How the two sides of attention meet: queries travel to the keys, or keys to the queries."""
