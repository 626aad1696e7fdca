"""What a deployment over regions costs, measured between network namespaces of one machine."""
