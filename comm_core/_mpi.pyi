"""The MPI backend of comm_core. Importing it registers the backend and starts nothing."""
