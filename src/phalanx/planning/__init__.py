"""What a launch will be, decided on the login side: settings, facts and program become a plan."""
