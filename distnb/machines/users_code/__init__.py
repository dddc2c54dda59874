"""The code that programs need on other machines: folders that are sent there, and packages that are compared."""
