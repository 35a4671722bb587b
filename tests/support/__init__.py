"""What the tests share: the server they run on, the worlds they run in, the faults they cause."""
