package settings

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"gopkg.in/yaml.v3"

	"github.com/kvagent/kvagent/secret"
)

// A setting is taken from its flag, else the environment, else the file, else its default. The flag
// set is the only list of keys: --socket-dir is KVAGENT_SOCKET_DIR in the environment and
// socket-dir in the file.

// envPrefix begins every setting's name in the environment.
const envPrefix = "KVAGENT_"

// FileKey is the setting that names the file; it cannot be in the file itself.
const FileKey = "config"

func envName(key string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(key, "-", "_"))
}

// Fill sets each flag that is not on the command line from the environment or the file, and checks
// the socket directory, of which the default too may not be allowed.
func Fill(flags *pflag.FlagSet, lookupEnv func(string) (string, bool)) error {
	bad := []error{fill(flags, "", func(key string) (string, bool) { return lookupEnv(envName(key)) })}
	if f := flags.Lookup(FileKey); f != nil && f.Value.String() != "" {
		bad = append(bad, FillFile(flags, FileKey, f.Value.String()))
	}
	if f := flags.Lookup("socket-dir"); f != nil {
		if dir, ours := f.Value.(*socketDirValue); ours {
			bad = append(bad, dir.check())
		}
	}
	return errors.Join(bad...)
}

// FillFile sets each flag that is not set yet from the file at path. key is what errors call the
// file.
func FillFile(flags *pflag.FlagSet, key, path string) error {
	file, err := readFile(flags, key, path)
	if err != nil {
		return err
	}
	return fill(flags, path, func(key string) (string, bool) {
		text, there := file[key]
		return text, there
	})
}

// fill sets each flag that is not set yet from a file, or, without one, from the environment.
func fill(flags *pflag.FlagSet, file string, value func(key string) (string, bool)) error {
	var bad []error
	flags.VisitAll(func(f *pflag.Flag) {
		text, there := value(f.Name)
		if !there || f.Changed || f.Name == "help" {
			return
		}
		if err := flags.Set(f.Name, text); err != nil {
			from := envName(f.Name)
			if file != "" {
				from = file + ": " + f.Name
			}
			bad = append(bad, invalidValue(from, text, err))
		}
	})
	return errors.Join(bad...)
}

// readFile reads a file of settings; key is the one that names it. Unknown keys are errors.
func readFile(flags *pflag.FlagSet, key, path string) (map[string]string, error) {
	text, err := secret.Read(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %q, allowed: an existing file", key, path)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %s: %w", key, path, err)
	}
	var nodes map[string]yaml.Node
	in := yaml.NewDecoder(bytes.NewReader(text))
	if err := in.Decode(&nodes); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: %s: %w", key, path, err)
	}
	if err := in.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: %s: more than one document, allowed: one", key, path)
	}
	return readNodes(flags, key, path, nodes)
}

func readNodes(flags *pflag.FlagSet, fileKey, path string, nodes map[string]yaml.Node) (map[string]string, error) {
	out := make(map[string]string, len(nodes))
	var bad []error
	for key, node := range nodes {
		if f := flags.Lookup(key); f == nil || key == fileKey || key == "help" {
			bad = append(bad, fmt.Errorf("%s:%d: %s: unknown, allowed: %s", path, node.Line, key,
				strings.Join(settingKeys(flags), ", ")))
			continue
		}
		text, err := nodeText(&node)
		if err != nil {
			bad = append(bad, fmt.Errorf("%s:%d: %s: %w", path, node.Line, key, err))
		}
		out[key] = text
	}
	return out, errors.Join(bad...)
}

// nodeText returns a scalar's text, or a list of scalars joined by commas.
func nodeText(node *yaml.Node) (string, error) {
	switch node.Kind {
	case yaml.ScalarNode:
		return node.Value, nil
	case yaml.SequenceNode:
		parts := make([]string, len(node.Content))
		for i, item := range node.Content {
			if item.Kind != yaml.ScalarNode {
				return "", errors.New("a list in a list, allowed: a value, or a list of values")
			}
			parts[i] = item.Value
		}
		return strings.Join(parts, ","), nil
	}
	return "", errors.New("a mapping, allowed: a value, or a list of values")
}

// settingKeys returns the keys of the file, sorted, without hidden ones.
func settingKeys(flags *pflag.FlagSet) []string {
	var out []string
	flags.VisitAll(func(f *pflag.Flag) {
		if !f.Hidden && f.Name != FileKey && f.Name != "help" {
			out = append(out, f.Name)
		}
	})
	slices.Sort(out)
	return out
}

// UnknownEnv returns the variables of an environment that look like settings and are none, sorted.
// They are no error, because a cluster may have made them for a service of that name.
func UnknownEnv(flags *pflag.FlagSet, environ []string) []string {
	known := make(map[string]bool)
	flags.VisitAll(func(f *pflag.Flag) { known[envName(f.Name)] = true })
	var out []string
	for _, pair := range environ {
		if name, _, _ := strings.Cut(pair, "="); strings.HasPrefix(name, envPrefix) && !known[name] {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

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
