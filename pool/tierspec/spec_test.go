package tierspec

import (
	"fmt"
	"strings"
	"testing"
)

func TestTierSpecs(t *testing.T) {
	for _, c := range []struct{ spec, want string }{
		{"tape:/x", "allowed: disk, "},
		{"disk:/x", "capacity must be given"},
		{"disk:/x?capacity=1GiB&capacity=2GiB", "given 2 times"},
		{"disk:/x?capacity=1GiB&wrote=save", "wrote: no option of this tier"},
		{"disk:/x?capacity=1GiB&write=often", "allowed: never, save, second-use"},
		{"disk:/x?capacity=1GiB&within=0s", `within: "0s", allowed: 20ms to 1m0s`},
		{"redis://user:secret@h:1", "password-file or password-env"},
		{"redis://h:1?password-env=KV_TEST_NOT_THERE", "not in the environment"},
		{"redis://h:1/x", "allowed: a number"},
	} {
		if _, err := Parse(c.spec); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.spec, err, c.want)
		}
	}
	var specs []*Spec
	v := Setting(&specs)
	if err := v.Set("disk:/x?capacity=1GiB&dirs=/y,/z,redis://a:1,b:2/3?name=shared"); err != nil {
		t.Fatal(err)
	}
	if fmt.Sprintf("%d %s %v %s %v", len(specs), specs[0].Name, specs[0].Write, specs[1].Name,
		specs[1].Write) != "2 disk second-use shared save" {
		t.Errorf("%+v", specs)
	}
}
