"""What all rooms talk about: messages, ids, paths, options, errors, the clock. No I/O."""
