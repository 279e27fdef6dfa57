"""What outputs must look like: grammars compiled, and matched token by token (llguidance). No torch."""
