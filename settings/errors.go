package settings

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// InvalidError is the error of an invalid setting or argument.
type InvalidError struct{ err error }

func (e *InvalidError) Error() string { return e.err.Error() }
func (e *InvalidError) Unwrap() error { return e.err }

// Invalid makes an error, unless it is nil, one of an invalid setting.
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

// plainTypes describes the allowed values of flags whose own errors do not.
var plainTypes = map[string]string{
	"bool": "true, false", "int": "a whole number", "int64": "a whole number", "uint64": "a whole number from 0 on",
	"float64": "a number",
}

// invalidValue returns the error of a flag's value, which came from where it says, without secrets
// and without the flag library's own prefix.
func invalidValue(from, text string, err error) error {
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) {
		err = invalid.Unwrap()
		if v, keeps := invalid.GetFlag().Value.(Discreet); keeps {
			text = v.Shown(text)
		} else if allowed, plain := plainTypes[invalid.GetFlag().Value.Type()]; plain &&
			errors.As(err, new(*strconv.NumError)) {
			err = errors.New("allowed: " + allowed)
		}
	}
	return fmt.Errorf("%s: %q, %w", from, text, err)
}

// FlagError returns an error of the command line that names the flag and what is allowed.
func FlagError(cmd *cobra.Command, err error) error {
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) {
		err = invalidValue("--"+invalid.GetFlag().Name, invalid.GetValue(), err)
	}
	return Invalid(fmt.Errorf("%w (see: %s --help)", err, cmd.CommandPath()))
}
