"""The judge of admission: public traces run through the production decisions in front of a simulated engine."""
