"""The networks that are trained in benchmarks, with synthetic inputs. Import ``bench.models.catalog`` for the list."""
