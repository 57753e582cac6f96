"""Files of models from outside: checked, read and parsed in a child process of their own, and copied part by part."""
