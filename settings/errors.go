package settings

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// InvalidError is the error of a setting or an argument that is not allowed.
type InvalidError struct{ err error }

func (e *InvalidError) Error() string { return e.err.Error() }
func (e *InvalidError) Unwrap() error { return e.err }

// Invalid says that an error, unless it is nil, is of a setting that is not allowed.
func Invalid(err error) error {
	if err == nil {
		return nil
	}
	return &InvalidError{err}
}

// Args makes a wrong number of arguments an invalid setting.
func Args(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error { return Invalid(check(cmd, args)) }
}

// plainTypes says what is allowed of flags whose values say only that they cannot be read.
var plainTypes = map[string]string{
	"bool": "true, false", "int": "a whole number", "int64": "a whole number", "uint64": "a whole number from 0 on", "float64": "a number",
}

// invalidValue says what is wrong with a flag's value, and shows nothing of it that is secret.
func invalidValue(err *pflag.InvalidValueError) error {
	f := err.GetFlag()
	if v, keeps := f.Value.(Discreet); keeps {
		return fmt.Errorf("--%s: %q, %w", f.Name, v.Shown(err.GetValue()), err.Unwrap())
	}
	if allowed, plain := plainTypes[f.Value.Type()]; plain && errors.As(err, new(*strconv.NumError)) {
		return fmt.Errorf("--%s: %q, allowed: %s", f.Name, err.GetValue(), allowed)
	}
	return err
}

// FlagError is an error of the command line: it names the flag and what is allowed.
func FlagError(cmd *cobra.Command, err error) error {
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) {
		err = invalidValue(invalid)
	}
	return Invalid(fmt.Errorf("%w (see: %s --help)", err, cmd.CommandPath()))
}
