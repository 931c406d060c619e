"""A run as one HTML file that needs no network and no server: `invoke report RUN`, and two runs compared.

    run_folder    what is in the run folder, whole or not
    curves        the panels, drawn by plotly
    accuracy      accuracy of each step with its interval, from the trajectories
    trajectories  every trajectory: columns to filter by, and packed texts that the browser opens one by one
    facts         the numbers on top, and tables of data, versions and configuration
    compare       what differs between runs
    page          puts it together; page/ holds the template, the style and the scripts

Nothing that a model or its program wrote is ever markup here: it travels as compressed JSON in inert elements, and the
scripts put it into the page as text nodes. A content security policy allows the page's own scripts by their hashes.
"""
