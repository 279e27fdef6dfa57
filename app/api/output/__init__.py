"""Model outputs: the grammars that constrain them (structured output, tools), and the responses written from them."""
