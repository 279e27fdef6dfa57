"""What an output must look like (structured output, tools) and how outputs become responses."""
