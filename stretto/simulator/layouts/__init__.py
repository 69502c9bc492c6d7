"""Workers of several processes in a simulation: whole models whose time and bytes are those of their ranks."""
