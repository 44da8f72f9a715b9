//go:build !amd64

package cudaipc

type moveForm struct {
	name string
	use  func() func()
}

func moveForms() []moveForm {
	return []moveForm{{"portable", func() func() { return func() {} }}}
}
