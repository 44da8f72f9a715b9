package main

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// plainTypes says what is allowed of flags whose values say only that they cannot be read.
var plainTypes = map[string]string{
	"bool": "true, false", "int": "a whole number", "int64": "a whole number", "uint64": "a whole number from 0 on", "float64": "a number",
}

// flagError is an error of the command line: it names the flag and what is allowed.
func flagError(cmd *cobra.Command, err error) error {
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) && errors.As(err, new(*strconv.NumError)) {
		f := invalid.GetFlag()
		if allowed, ok := plainTypes[f.Value.Type()]; ok {
			err = fmt.Errorf("--%s: %q, allowed: %s", f.Name, invalid.GetValue(), allowed)
		}
	}
	return exitError{exitConfig, fmt.Errorf("%w (see: %s --help)", err, cmd.CommandPath())}
}
