"""The whole service measured from outside, over HTTP; a few of its parts, by themselves."""
