"""What operators see of a controller: the page, and the sentences that it begins with."""
