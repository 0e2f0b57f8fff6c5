"""What is wrong with the job: slow, hung and crashed cases, validations, and what they ask agents."""
