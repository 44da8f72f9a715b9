// Package tierspec parses the --tier option, which describes a store below the pool, shows it
// without secrets, and opens the store.
package tierspec

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/kvagent/kvagent/pool/tier"
	"github.com/kvagent/kvagent/secret"
	"github.com/kvagent/kvagent/settings"
)

// Spec is one parsed --tier: SCHEME:WHERE?OPTION=VALUE&... The options of every tier (name, write,
// within) are read here, the others by the scheme's reader; all are checked before anything is
// opened. What only tests set are fields of the stores' Options and of tier.Tier.
type Spec struct {
	tier.Tier
	Text   string
	Scheme string
	Path   string // of the URL
	Open   func(*Needs) (Opened, error)
}

// tierSchemes holds the reader of each scheme. A reader checks a whole spec, and returns a function
// that opens the store later.
var tierSchemes = map[string]func(u *url.URL, o *options) func(*Needs) (Opened, error){
	SchemeDisk: readDiskTier,
	"s3":       readS3Tier,
	"redis":    readRedisTier,
	"rediss":   readRedisTier,
	"mooncake": readMooncakeTier,
}

// Parse parses a spec.
func Parse(text string) (*Spec, error) {
	u, err := url.Parse(text)
	if err != nil {
		return nil, errors.New("no URL, allowed: SCHEME:WHERE?OPTION=VALUE&OPTION=VALUE")
	}
	read := tierSchemes[u.Scheme]
	if read == nil {
		names := make([]string, 0, len(tierSchemes))
		for name := range tierSchemes {
			names = append(names, name)
		}
		slices.Sort(names)
		return nil, fmt.Errorf("scheme %q, allowed: %s", u.Scheme, strings.Join(names, ", "))
	}
	if _, has := u.User.Password(); has {
		return nil, errors.New("a password in it, allowed: password-file or password-env, " +
			"because other users can read command lines")
	}
	o := &options{values: u.Query()}
	o.fail(oddPart(u))
	s := &Spec{Text: text, Scheme: u.Scheme, Path: u.Path}
	s.Name, s.Write = u.Scheme, tier.OnSave
	if u.Scheme == SchemeDisk {
		s.Write = tier.OnSecondUse
	}
	s.readCommon(o)
	s.Open = read(u, o)
	return s, o.end()
}

// oddPart returns an error for a part of a URL that its scheme does not use. Ignoring it could open
// another store than the one meant.
func oddPart(u *url.URL) error {
	switch {
	case u.User != nil && !strings.HasPrefix(u.Scheme, "redis"):
		return errors.New("a user in it, allowed: one with redis:// and rediss://")
	case u.Fragment != "":
		return errors.New("a # in it, allowed: %23")
	case u.Scheme == SchemeDisk && u.Host != "":
		return fmt.Errorf("the host %q in it, allowed: disk:/DIRECTORY", u.Host)
	case u.Scheme == "mooncake" && strings.Trim(u.Path, "/") != "":
		return fmt.Errorf("the path %q in it, allowed: mooncake://HOST:PORT", u.Path)
	}
	return nil
}

func (s *Spec) readCommon(o *options) {
	s.Name = o.text("name", s.Name)
	if when := o.text("write", s.Write.String()); when != s.Write.String() {
		var err error
		if s.Write, err = tier.ParseWhen(when); err != nil {
			o.bad = append(o.bad, err)
		}
	}
	if within := o.duration("within", 20*time.Millisecond, time.Minute); within != 0 {
		s.FetchWithin, s.PutWithin, s.AskWithin = within, within*5/2, min(within/4, 2*time.Second)
	}
}

// options holds the options of a spec that were not read yet. Reading one with an invalid value
// records an error; end returns all errors, and one for each option that was not read.
type options struct {
	values url.Values
	bad    []error
}

func (o *options) take(key string) (string, bool) {
	v, there := o.values[key]
	delete(o.values, key)
	if !there {
		return "", false
	}
	if len(v) != 1 {
		o.bad = append(o.bad, fmt.Errorf("%s: given %d times, allowed: once", key, len(v)))
	}
	return v[0], true
}

// value parses an option with the parser of a setting.
func (o *options) value(key string, v interface{ Set(string) error }) {
	if text, there := o.take(key); there {
		if err := v.Set(text); err != nil {
			// The value may contain another tier that was not separated.
			o.bad = append(o.bad, fmt.Errorf("%s: %q, %w", key, Shown(text), err))
		}
	}
}

func (o *options) text(key, def string) string {
	if text, there := o.take(key); there {
		return text
	}
	return def
}

// count (1 to high), size and duration return 0, a store's default, if the option is not given.
func (o *options) count(key string, high int) (n int) {
	o.value(key, settings.Count(&n, 1, high))
	return n
}

func (o *options) size(key string, low, high int64) (n int64) {
	o.value(key, settings.Size(&n, low, high))
	return n
}

func (o *options) duration(key string, low, high time.Duration) (d time.Duration) {
	o.value(key, settings.Duration(&d, low, high))
	return d
}

func (o *options) choice(key, def string, allowed ...string) string {
	o.value(key, settings.Choice(&def, allowed))
	return def
}

// secret reads a secret, which is on no command line, from KEY-file or the variable of KEY-env.
func (o *options) secret(key string) (string, error) {
	file, variable := o.text(key+"-file", ""), o.text(key+"-env", "")
	switch {
	case file != "" && variable != "":
		return "", fmt.Errorf("%s-file and %s-env are both given, allowed: one", key, key)
	case file != "":
		text, err := secret.Read(file)
		if err == nil && strings.TrimRight(string(text), "\r\n") == "" {
			err = errors.New("is empty, allowed: a file with the secret")
		}
		if err != nil {
			err = fmt.Errorf("%s-file: %s: %w", key, file, err)
		}
		return strings.TrimRight(string(text), "\r\n"), err
	case variable != "":
		text := os.Getenv(variable)
		if text == "" {
			return "", fmt.Errorf("%s-env: %q is empty or not in the environment, allowed: a variable with the secret",
				key, variable)
		}
		return text, nil
	}
	return "", nil
}

// fail records an error of a reader.
func (o *options) fail(err error) {
	if err != nil {
		o.bad = append(o.bad, err)
	}
}

func (o *options) end() error {
	for key := range o.values {
		o.bad = append(o.bad, fmt.Errorf("%s: no option of this tier, see docs/TIERS.md", key))
	}
	return errors.Join(o.bad...)
}

// Setting returns the repeatable setting --tier.
func Setting(v *[]*Spec) pflag.Value { return &tiersValue{v} }

// tiersValue is the value of --tier. In the environment and in the file, commas separate several
// tiers; since a tier may contain commas, only a comma before a scheme separates.
type tiersValue struct{ v *[]*Spec }

var nextTier = regexp.MustCompile(`,[a-z0-9]+:/`)

func (t *tiersValue) Type() string { return "url" }
func (t *tiersValue) String() string {
	if t.v == nil {
		return ""
	}
	var out []string
	for _, s := range *t.v {
		out = append(out, s.Text)
	}
	return strings.Join(out, ",")
}

func (t *tiersValue) Set(text string) error {
	for text != "" {
		one := text
		if at := nextTier.FindStringIndex(text); at != nil {
			one, text = text[:at[0]], text[at[0]+1:]
		} else {
			text = ""
		}
		s, err := Parse(strings.TrimSpace(one))
		if err != nil {
			return err
		}
		*t.v = append(*t.v, s)
	}
	return nil
}

// Hidden replaces secrets of a --tier in errors and in the log. A --tier with a secret in it is
// refused, and the error must not show it either.
const Hidden = "***"

var (
	// secretUser matches what follows a user's colon, up to the last @: any character may be in it.
	secretUser = regexp.MustCompile(`//([^:@/,?]*):.*@`)
	// secretOption matches an option that sounds like a secret and names no file or variable.
	secretOption = regexp.MustCompile(`(?i)([?&][^=&]*(?:pass|pw|secret|token|key|auth|cred|metadata)[^=&]*)=([^&]*)`)
	namesSecret  = regexp.MustCompile(`-(file|env)$`)
)

// Shown returns a spec, or any text, which may have secrets too, without them.
func Shown(text string) string {
	text = secretUser.ReplaceAllString(text, "//$1:"+Hidden+"@")
	return secretOption.ReplaceAllStringFunc(text, func(option string) string {
		part := secretOption.FindStringSubmatch(option)
		// Metadata without a user in it is harmless.
		harmless := strings.HasSuffix(part[1], "metadata") &&
			!strings.Contains(part[2], "@") && !strings.Contains(part[2], "%40")
		if harmless || namesSecret.MatchString(part[1]) || part[2] == "" {
			return option
		}
		return part[1] + "=" + Hidden
	})
}

func (t *tiersValue) Shown(text string) string { return Shown(text) }
