"""Request fields and response frames that OpenAI's chat and completions endpoints share."""
