package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/lab"
	"github.com/kvagent/kvagent/pool/tierspec"
)

// A secret that is put where none may be is refused, and no error shows it, wherever the setting
// came from.
func TestSecretsAreNotShown(t *testing.T) {
	const secret = "hunter2"
	for _, spec := range []string{
		"redis://user:hunter2@h:1", "redis://:hunter2@h:1", "redis://user:x/?@hunter2@h:1",
		"rediss://user:hunter2@h:1?wrote=x", "redis://h:1?password=hunter2",
		"redis://h:1?name=x&Password=hunter2", "redis://h:1?auth-pass=hunter2", "s3://id:hunter2@bucket",
		"s3://bucket?secret-key=hunter2", "s3://bucket?access-key=hunter2&session-token=hunter2",
		"mooncake://h:1?metadata=redis://u:hunter2@h", "mooncake://h:1?metadata=redis%3A%2F%2Fu%3Ahunter2%40h",
		"mooncake://h:1?redis-password=hunter2",
		"redis://user:hunter2@h:1:2:3", "redis://us er:hunter2@h", "disk:/x?capacity=1,redis://user:hunter2@h:1",
	} {
		hold := func(where string, err error) {
			t.Helper()
			switch {
			case err == nil:
				t.Errorf("%s: %s was accepted", where, spec)
			case strings.Contains(err.Error(), secret):
				t.Errorf("%s: %v", where, err)
			case !strings.Contains(err.Error(), tierspec.Hidden):
				t.Errorf("%s: %v, want one that shows that something is hidden", where, err)
			}
		}
		root := rootCommand()
		root.SetArgs([]string{"serve", "--tier", spec})
		hold("serve", root.Execute())
		for _, key := range []string{"tier", "shared"} {
			var log strings.Builder
			if lab.Main([]string{"replay", "--scenario", scenarioFile(t, key+`: "`+spec+`"`)}, &log) == 0 {
				t.Errorf("replay, %s: %s was accepted", key, spec)
			}
			hold("replay, "+key, errors.New(log.String()))
		}
		_, err := readSettings(t, nil, map[string]string{"KVAGENT_TIER": spec}, "")
		hold("environment", err)
		_, err = readSettings(t, nil, nil, "tier: \""+spec+"\"\n")
		hold("file", err)
	}
	for _, spec := range []string{
		"redis://user@h:1?password-file=/etc/p&prefix=a", "redis://h:1?password-env=P",
		"s3://b?access-key-file=/k&secret-key-env=S", "disk:/x?capacity=1GiB",
		"mooncake://h:1?metadata=http://h:8080/metadata", "mooncake://h:1?metadata-file=/m", "redis://a:1,b:2/3?ttl=1h",
	} {
		if shown := tierspec.Shown(spec); shown != spec {
			t.Errorf("%s is shown as %s, and nothing in it is secret", spec, shown)
		}
	}
}

// Options that a scheme does not have are an error: ignoring them would open another store than was
// meant.
func TestOddPartsOfTiers(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, []byte("\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KV_TEST_EMPTY", "")
	for spec, want := range map[string]string{
		"disk://mnt/nvme0?capacity=1GiB":         `the host "mnt"`,
		"disk://user@/mnt?capacity=1GiB":         "a user in it",
		"s3://key@bucket":                        "a user in it",
		"mooncake://h:1/here":                    `the path "/here"`,
		"redis://h:1?prefix=a#b":                 "a # in it",
		"redis://h:1?password-file=" + empty:     "is empty",
		"redis://h:1?password-env=KV_TEST_EMPTY": "is empty or not in the environment",
		"redis://h:1?password-file=/dev/zero":    "more than",
	} {
		if _, err := tierspec.Parse(spec); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", spec, err, want)
		}
	}
}
