"""Tests of backends/drivers."""
