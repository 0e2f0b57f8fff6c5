"""Files that were made to harm whoever reads them, given to the commands that read files of others."""
