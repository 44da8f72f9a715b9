package tierspec

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/tier"
	"github.com/kvagent/kvagent/pool/tier/transit"
)

// badValue is a value of an option that is not allowed, and how the error names the option where
// that is not as it is written.
type badValue struct{ option, value, named string }

// Options of every tier, and of each kind, with values that are not allowed.
var (
	badOfEveryTier = []badValue{
		{"name", "Upper", "Name"}, {"name", strings.Repeat("x", 33), "Name"}, {"name", "", "Name"},
		{"write", "often", ""}, {"within", "19ms", ""}, {"within", "61s", ""}, {"within", "2", ""},
	}
	badByKind = map[string][]badValue{
		"disk:/nowhere?capacity=1GiB": {
			{"dirs", "relative", "Dir"},
		},
		"disk:/nowhere": {{"capacity", "1KiB", ""}, {"capacity", "65TiB", ""}},
		"redis://h:1": {
			{"password-file", "/nowhere/p", "/nowhere/p"}, {"password-env", "KV_TEST_NOT_THERE", ""},
			{"mode", "twin", ""}, {"mode", "sentinel", "MasterName"}, {"master", "m", "MasterName"},
			{"prefix", strings.Repeat("x", 129), "Prefix"}, {"prefix", "{x}", "Prefix"}, {"ttl", "10ms", ""},
			{"ttl", "87601h", ""}, {"ttl", "-1s", ""},
			{"tls-ca-file", "/nowhere/ca", ""}, {"tls-server-name", "x", ""},
		},
		"redis://h:1/65536": {{"prefix", "x", "Database"}},
		"redis://h":         {{"prefix", "x", "Addresses"}},
		"rediss://h:1":      {{"tls-ca-file", "/nowhere/ca", ""}},
		"s3://bucket": {
			{"endpoint", "https://x", "Endpoint"}, {"tls", "yes", ""}, {"path-style", "yes", ""},
			{"access-key-file", "/nowhere/k", "/nowhere/k"}, {"access-key-env", "KV_TEST_NOT_THERE", ""},
			{"secret-key-file", "/nowhere/k", "/nowhere/k"}, {"secret-key-env", "KV_TEST_NOT_THERE", ""},
			{"session-token-file", "/nowhere/k", "/nowhere/k"}, {"session-token-env", "KV_TEST_NOT_THERE", ""},
			{"access-key-env", "PATH", "SecretKey"},
			{"tls-ca-file", "/nowhere/ca", ""},
		},
		"s3://bucket/" + strings.Repeat("x", 257): {{"region", "x", "Prefix"}},
		"s3://UPPER": {{"region", "x", "Bucket"}},
		"mooncake://h:1": {
			{"master", "h", "Master"}, {"metadata", "redis://u:p@h", ""}, {"metadata-file", "/nowhere/m", "/nowhere/m"},
			{"metadata-env", "KV_TEST_NOT_THERE", ""},
			{"redis-password-file", "/nowhere/p", "/nowhere/p"}, {"redis-password-env", "KV_TEST_NOT_THERE", ""},
			{"protocol", "udp", ""}, {"devices", "mlx5_0", "Devices"}, {"host", "a b", "Host"},
			{"segment", "17TiB", ""},
			{"replicas", "0", ""}, {"replicas", "17", ""},
			{"prefix", strings.Repeat("x", 129), "Prefix"},
			{"python", "/nowhere/python3", "Python"},
		},
	}
	// noBadValue are options that any text will do for.
	noBadValue = []string{"region"}
)

// trySpec parses a spec and opens its store and a pool over it.
func trySpec(t *testing.T, text string) error {
	t.Helper()
	s, err := Parse(text)
	if err != nil {
		return err
	}
	staging, err := transit.OpenStaging(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer staging.Close()
	if s.Scheme != SchemeDisk && s.Name == s.Scheme || s.Scheme == SchemeDisk && s.Name == SchemeDisk {
		opened, err := s.Open(&Needs{Spec: s, Staging: staging, Log: zap.NewNop()})
		if err != nil {
			return err
		}
		if err := opened.Close(); err != nil {
			t.Fatal(err)
		}
	}
	m, err := dram.Open(dram.Options{Bytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	one := s.Tier
	one.Store = pooltest.NewShelf()
	p, err := tier.Open(m, []tier.Tier{one}, tier.Options{Staging: staging})
	if err == nil {
		err = p.Close()
	}
	return err
}

// TestBadTierOptions expects every invalid value to end in an error that names the option and the
// allowed values.
func TestBadTierOptions(t *testing.T) {
	hold := func(spec string, bad badValue) {
		t.Helper()
		named := bad.option
		if bad.named != "" {
			named = bad.named
		}
		joint := "?"
		if strings.Contains(spec, "?") {
			joint = "&"
		}
		text := spec + joint + bad.option + "=" + bad.value
		err := trySpec(t, text)
		if err == nil || !strings.Contains(err.Error(), named) {
			t.Errorf("%.120s: %v, want an error that names %s", text, err, named)
			return
		}
		if said := err.Error(); !strings.Contains(said, "allowed") && !strings.Contains(said, "no such file") &&
			!strings.Contains(said, "not in the environment") && !strings.Contains(said, "not there") &&
			!strings.Contains(said, "must be") {
			t.Errorf("%.120s: %v, want what is allowed", text, err)
		}
	}
	for _, bad := range badOfEveryTier {
		hold("s3://bucket", bad)
	}
	for spec, all := range badByKind {
		for _, bad := range all {
			hold(spec, bad)
		}
	}
}

// TestTierOptionsAreDocumented expects every option with a row in docs/TIERS.md to exist and to
// have an invalid value here, and the reverse.
func TestTierOptionsAreDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/TIERS.md")
	if err != nil {
		t.Fatal(err)
	}
	options := func(part string) (all []string) {
		for _, row := range regexp.MustCompile("(?m)^\\| (`[^|]*) \\|").FindAllStringSubmatch(part, -1) {
			first := ""
			for _, name := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row[1], -1) {
				switch n := name[1]; {
				case strings.HasPrefix(n, "-") && !strings.HasPrefix(n, "--"): // `access-key-file`, `-env`
					all = append(all, strings.TrimSuffix(first, "-file")+n)
				case regexp.MustCompile(`^[a-z][a-z0-9-]*$`).MatchString(n):
					first = n
					all = append(all, n)
				}
			}
		}
		return all
	}
	sections := map[string]string{}
	for _, part := range strings.Split(string(text), "\n## ")[1:] {
		title, rest, _ := strings.Cut(part, "\n")
		sections[title] = rest
	}
	common := sections["The stack"]
	common = common[strings.Index(common, "| option of every tier"):]
	for name, c := range map[string]struct {
		part  string
		specs []string
	}{
		"Disk":            {sections["Disk"], []string{"disk:/nowhere?capacity=1GiB", "disk:/nowhere"}},
		"Valkey or Redis": {sections["Valkey or Redis"], []string{"redis://h:1", "rediss://h:1"}},
		"S3":              {sections["S3"], []string{"s3://bucket"}},
		"Mooncake":        {sections["Mooncake"], []string{"mooncake://h:1"}},
		"every tier":      {common, nil},
	} {
		bad := badOfEveryTier
		if c.specs != nil {
			bad = nil
			for _, spec := range c.specs {
				bad = append(bad, badByKind[spec]...)
			}
		}
		documented := options(c.part)
		if i := slices.Index(documented, "ok"); i >= 0 {
			documented = documented[:i] // the table of states
		}
		for _, option := range documented {
			if !slices.Contains(noBadValue, option) &&
				!slices.ContainsFunc(bad, func(b badValue) bool { return b.option == option }) {
				t.Errorf("%s: %s is documented, and no value of it is tested", name, option)
			}
		}
		for _, b := range bad {
			if !slices.Contains(documented, b.option) {
				t.Errorf("%s: %s is an option, and is not documented", name, b.option)
			}
		}
	}
}
